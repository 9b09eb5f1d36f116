"""The rules by which answers are accepted, each in one file: its configuration, its decision where requests are served, what
it does to judged prompts, and what planning tries of it. Pure.

`pipeline` has their fixed order. Decisions are written once, for numbers as routers have them and for arrays as planning has
them, so what is planned is what is served. Routers have no numpy: only what planning alone calls imports it.
"""

import penstock.services.domain  # noqa: F401 - first, because plans check themselves by these rules
