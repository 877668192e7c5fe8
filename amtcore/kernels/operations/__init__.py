"""One module per operation: equations, plain form in torch, compiled parts, description.

Compiled parts serve the processor and a GPU. It may import `operation`, `torch_state`, `vector`.
"""
