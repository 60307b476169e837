"""The parts from which a layer is built for a device. A builder in `models` chooses among them."""
