"""The questions that the paper leaves open: each a module that plays and counts, and a page with its words.

    q06_unique.py     points(quick) -> the runs, each a dict of plain values, for several seeds
                      run(point)    -> what one of them came to, as JSON; called in any process
                      numbers(rows) -> the numbers of the page by name
                      claims(numbers) -> what the page's words rest on: sentence -> whether it holds
                      draw(axes, rows)   the one figure
    q06_unique.md     the page. {gain:.2f} is a number of numbers(), {gain.spread:.2f} its range over seeds

A point with "alone": True is run by itself when all others have ended: it starts ranks or measures time. A
page has the headings of `frame.HEADINGS`, and its second paragraph begins with "Source:". Digits stand there,
in the title, in braces, in `code` and in links, and nowhere else: a test says so. So no page keeps a number
that is not true any more, and words that no longer hold are a failing claim. `make questions` plays what has
no result, and writes the pages.
"""
