"""Settings of Sphinx for the site; tools/build_site.py copies this beside the pages."""

from pathlib import Path

project = "Distributed training, taken apart"
html_title = project
extensions = ["myst_nb"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
language = "en"
smartquotes = False  # a docstring's op="sum" is code

nb_execution_mode = "off"  # a lesson is shown as it is stored
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_ipywidgets_js = {}
nb_merge_streams = True
nb_render_error_lexer = "myst-ansi"  # a report is no Python
myst_enable_extensions = ["dollarmath", "amsmath", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

html_theme = "furo"
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_extra_path = ["extra"]
html_css_files = ["course.css"]
html_js_files = ["course.js"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#00547f",
        "color-brand-content": "#00547f",
        "color-brand-visited": "#00547f",
        "color-foreground-muted": "#55595f",
        "color-foreground-border": "#6d7178",
        "color-api-name": "#00547f",
        "color-api-pre-name": "#00547f",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc4f0",
        "color-brand-content": "#7cc4f0",
        "color-brand-visited": "#7cc4f0",
        "color-foreground-muted": "#a3a8af",
        "color-api-name": "#7cc4f0",
        "color-api-pre-name": "#7cc4f0",
    },
}
add_module_names = False
toc_object_entries = False  # the lists at the side stay short
python_display_short_literal_types = True

mathjax_path = "mathjax.js"
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would load files from elsewhere
