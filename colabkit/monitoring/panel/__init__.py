"""The live panel.

`api` holds `dashboard()`. A `recorder` collects the `content`, which `html` and `text` render and `screens` display.
"""
