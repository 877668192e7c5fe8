"""Sequential kernels: operations, chains of operations, devices, and torch operators.

Each layer may import the layers to its right, and `amtcore.errors`:

    operators -> devices -> cpu, gpu -> backend -> chain -> registry -> operations -> operation
                                                                                 -> vector
"""
