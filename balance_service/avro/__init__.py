"""Avro: the schemas we ship, the registry that numbers them, the frame that names them."""
