"""What people run: the command line and ready job specs.

It may import the pipeline and the models; nothing but `earmill.api` imports it.
"""
