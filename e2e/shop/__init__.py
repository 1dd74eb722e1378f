"""The application of the end-to-end stories: a shop that trades, and an auditor that proves what became of its events.

It runs inside the cluster, in an image made from the relay's (which has ``mailboat``, psycopg and the brokers'
clients), so that nothing on the machine of the tests has to reach into the cluster's network. The tests start it with
``kubectl exec`` and read what it prints.
"""
