"""The losses that training minimizes: over target tokens, drawn patches and routers of experts."""
