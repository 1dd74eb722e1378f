"""The relay process: reads its configuration, connects to the database, runs sessions, reconnects and reports.

A relay has one state at a time (`relay_status.RelayState`, entered in `Relay._enter`):

    Connecting ──(session starts)──────────▶ Running
    Running ──(database lost, lease lost)──▶ Connecting
    Running ──(connection settings changed)─▶ Connecting
    Connecting ⇄ Failed
    any ──(stop)───────────────────────────▶ Stopping

- *Connecting*: there is no session. The relay migrates or verifies the schema, connects, declares its subscriptions and
  joins. If a dependency is unavailable, the relay retries with back-off. A new configuration, a changed secret or a
  stop ends the wait.
- *Failed*: like Connecting, but a person has to act: the schema, the database or the configuration is wrong. The relay
  retries, so a correction needs no restart. Only an invalid manifest that can't change at run time ends the relay.
- *Running*: one session on one connection. The process has set `Relay._connected`, which holds both.
- *Stopping*: the final state, caused by SIGTERM. The session finishes the batches in flight, settles and releases.

A configuration (`relay_config.RelayConfig`) is *pending* until the relay takes it up, then *undeclared* until its
subscriptions are written to the database, then *in use*. Only a relay with an undeclared configuration may repartition
a subscription.

Inside a session (`session.RelaySession`), each subscription and each partition has states of its own:

- Subscription: *admitted* (`admit`) → *withdrawing* (`withdraw`, caused by a configuration change) → removed, and
  admitted again if the configuration still has it (`relay_config.Connected`).
- Partition: *claimed* (`_follow`, when it has no owner) → *owned* with a worker → *releasing* (`_release`: finish,
  settle) → *released*. If another relay took it over, `lease_lost` cancels the worker without settling.
- When the session stops, it claims nothing more, and all partitions leave. Heartbeats continue until the last one left.
"""
