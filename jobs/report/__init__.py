"""The report of a dataset and the live page of a running job, from the same templates.

Modules `corpus`, `work` and `examples` give facts as plain values. Modules `plots` and `row_panels`
give figures as plain values. Modules `build` and `live` are the two pages; `server` serves the live
page. Only `page` and its templates know HTML; they escape every text. `row_panels` also draws its
figures as a PNG.
"""
