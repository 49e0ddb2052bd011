"""Magics: each makes one public call and returns its report; `%%train` and `%%dashboard` run the cell below them."""
