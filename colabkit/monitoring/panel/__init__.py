"""The live panel.

`api` holds `dashboard()`. A `recorder` collects the `content`, which `html`, with its `charts`, and `text` render.
`attached` shows a run of another process.
"""
