"""The application of the end-to-end stories: a shop that changes orders, and an audit of the delivery of its events.

It runs inside the cluster, in an image made from the relay's (which has ``mailboat``, psycopg and the brokers'
clients), so that the machine of the tests needs no access to the cluster's network. The tests start it with
``kubectl exec`` and parse its output.
"""
