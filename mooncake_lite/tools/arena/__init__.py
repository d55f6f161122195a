"""The arena: placement policies of a class race on a simulated cluster.

`race.py` plays a policy and scores it by goodput, `player.py` asks a policy in a child process, `bots.py`
knows what our own policies come to, `command.py` has the commands. Explained in docs/how-to/run-an-arena.md.
"""
