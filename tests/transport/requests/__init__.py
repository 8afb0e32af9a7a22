"""Requests: clients and servers against one another, against libzmq, and against bad peers."""
