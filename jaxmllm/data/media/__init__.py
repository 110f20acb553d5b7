"""Media: how an item is measured, how it is loaded into slots, and how its bytes are reached."""
