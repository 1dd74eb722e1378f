"""Relay and consumer pods as the operator sees them: views of pods, reports, pushes, and partition assignment.

States of a relay pod, by its answers to ``GET /status``:

    starting    never answered; polled after the others, in turn
    answering   its report is used
    silent      answered before and does not now; its last report is used for ``PollTimeouts.silence``, then discarded

States of an assignment:

    none        no relay has built a subscription, or none can serve it
    pushed      sent to one relay, which stores it in the database for all; pushed again after a timeout
    held        every partition is reported by its owner

All state here is lost with the process. The next leader polls the relays and continues from their reports.
"""
