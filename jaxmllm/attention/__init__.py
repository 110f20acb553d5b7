"""Attention over packed rows: who sees whom (mask), which blocks must meet (tiles), who computes
them (parts), and the kernels that visit them. The host's half, mask to parts, is numpy only."""
