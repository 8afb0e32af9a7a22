"""A store in an etcd cluster.

store.py        EtcdStore                     connection.py   one query, one transaction; waits; watches
contents.py     what a transaction reads and writes            cluster.py      members, requests, streams
"""
