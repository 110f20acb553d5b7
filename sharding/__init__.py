"""How arrays and programs lie on devices: meshes, logical-axis rules, the exchange between layouts.

Imports nothing of jaxmllm: kernels and model functions are passed in.
"""
