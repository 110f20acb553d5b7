"""Schedules: which rank does which operation in which tick. Every kind of schedule has a name in
by_name.py."""
