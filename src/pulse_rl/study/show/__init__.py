"""A report as a page: `plots` makes its charts, `page` puts them in order with the tables. Nothing is counted here."""
