"""How arrays and programs are placed on devices: meshes, rules for logical axes, the exchange
between layouts.

Imports nothing from jaxmllm: kernels and model functions are passed in.
"""
