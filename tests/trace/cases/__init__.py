"""Programs with a fault each, which ``zmqgrad trace`` must find. Start them with ``zmqgrad run``."""
