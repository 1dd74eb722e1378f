"""What is written into the status of both kinds, made from what relays report. Pure, clock included.

Numbers are rounded before they are compared, so that a status that says the same is not written again: an idle
cluster hears nothing from the operator.
"""
