"""`mooncake-lite top`: a live picture of a running cluster in the terminal, from its `/metrics` alone.

    scrape.py    GET /metrics -> Sample           HTTP, and the limits on what a server may send
    figures.py   two Samples -> Figures           pure: rates, medians, shares
    screen.py    Figures -> what rich prints      pure: layout, colour; numbers.py: numbers with their units
    command.py   the options, and the loop        clock, keys, terminal; svg.py: the picture as a file

Explained in docs/how-to/watch.md.
"""
