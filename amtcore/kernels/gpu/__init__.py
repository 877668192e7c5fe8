"""Operations on a GPU: PTX made of the same compiled parts, and what launches it.

backend -> chain_kernel -> device_code -> ptx -> launcher
cuda_launcher -> device -> driver
"""
