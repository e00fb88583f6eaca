"""Pages and charts in one HTML file that needs no network, for whoever shows something: a run, a study.

`charts` makes Vega-Lite specifications of numbers, `page` puts them in order with text and tables. Neither knows what
the numbers mean.
"""
