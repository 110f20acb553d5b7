"""Pipelines as tables: stages, schedules, schedule tables and the one executor that runs them all.

layers --cuts--> Ring                        ring.py, layer_costs.py, cuts.py
Ring, work of a batch --> Graph              graph.py, build_graph.py: operations and what each waits for
Graph --> Schedule                           schedules/: which rank does what in which tick
Schedule --> Table                           table_spec.py, slots.py, table.py; proven by validator.py
Table, parameters, rows --> loss, gradients  executor/
"""
