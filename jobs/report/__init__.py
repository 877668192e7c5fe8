"""The report of a dataset and the live page of a running job, from the same templates.

    stored, corpus, work, examples    facts as plain values
    plots, row_panels                 figures as plain values
    page, server                      HTML, and the server of the live page
    build, live                       the two pages

Only `page` and its templates know HTML; they escape every text. `row_picture` draws the figures of
rows as a PNG.
"""
