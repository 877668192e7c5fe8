"""What people run: the command line and ready job specs."""
