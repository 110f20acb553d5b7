"""Pipelines as tables: stages, schedules, schedule tables and the one executor that runs them all.

partition.py  layers -> Partition            which layers lie on which stage rank
graph.py      Ring, Workload -> Graph        the operations of one batch, what each waits for, how long it takes
schedule.py   Graph -> Schedule              which rank does what in which tick; what that costs
search.py     Graph -> Schedule              the same, searched
table.py      Schedule -> Table              int32 rows with slots and edges; the validator
executor.py   Table, parameters, rows -> loss and gradients
"""
