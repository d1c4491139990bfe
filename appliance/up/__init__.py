"""`appliance up`: keepers and engines in the foreground, with this process in the place of PID 1.

It keeps the keepers' descriptors while they restart, as systemd does. What dies with it dies for good: the weights
are resident for as long as this process lives.
"""
