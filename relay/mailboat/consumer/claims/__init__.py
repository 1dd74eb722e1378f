"""Claim stores: which events a consumer has handled, and which it is handling.

| module | holds |
|---|---|
| ``redis_store`` | ``RedisClaims``: claims in Redis or Valkey; scripts in ``*.lua``, called through ``scripts`` |
| ``redis_connections`` | clients for one server, Sentinel and cluster from one URL |
| ``redis_health`` | whether Redis can be relied on: eviction, lost memory, replicas |
| ``inbox`` | ``InboxClaims``, ``InboxExecution``: marks in the transaction of the effects |
| ``once`` | ``Once``: claims for applications with their own loop |
| ``owner`` | owners of claims, default times |
| ``renewal`` | the thread that renews leases |

States of an event: *absent* → *processing* (leased to an owner) → *done*; or → *failed* (until due) → *processing*; or
→ *dead* → *processing*, if the dead letter is replayed. A lease that ends without a result counts as a death of its
owner.
"""
