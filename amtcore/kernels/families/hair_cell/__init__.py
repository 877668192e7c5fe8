"""The membrane of an inner hair cell: a conductance that follows the input, and a leaky charge."""
