"""The report of a dataset, and the live page of a running job: one page code, two sets of facts.

    corpus, quarantine, work, examples, rows, about    what there is to say, as plain values
    plots, pictures, row_panels                        figures of it
    page, server                                       the HTML, and who serves it

Nothing here knows HTML but `page` and its templates, which escape every text.
"""
