"""The parts of which a device builds a layer. A builder of `models` chooses among them."""
