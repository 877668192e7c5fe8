"""The command line and ready job files. It may import the pipeline and the models; nothing but
`earmill.api` imports it."""
