"""The sequential kernels: operations, chains of them, devices that run them, and torch's operators.

    operators -> devices -> cpu, gpu -> backend -> chain -> registry -> operations -> operation
                                                                                 -> vector

An operation is one module in `operations`: equations, plain loop, compiled parts, and one object
that describes it. Each may import those named after it, and `amtcore.errors`.
"""
