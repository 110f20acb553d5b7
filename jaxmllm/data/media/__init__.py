"""Media: what an item is measured as, loaded into slots, and how its bytes are reached."""
