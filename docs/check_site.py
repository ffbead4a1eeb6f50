"""What a built page may weigh and load: below 200 kB each, and nothing from another host (``make docs`` runs it).

python docs/check_site.py [FOLDER]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SITE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "site"
LIMIT = 200_000
#: What a browser loads by itself, from another host.
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]+src=\"(?:https?:)?//|<link[^>]+href=\"(?:https?:)?//|@import|url\(['\"]?(?:https?:)?//"
)


def main() -> None:
    pages = sorted(SITE.rglob("*.html"))
    files = [*pages, *SITE.rglob("*.css")]
    heavy = [f"{p.relative_to(SITE)}: {p.stat().st_size} bytes" for p in pages if p.stat().st_size > LIMIT]
    outside = [f"{p.relative_to(SITE)} loads from another host" for p in files if LOADED.search(p.read_text("utf-8"))]
    if heavy or outside or not pages:
        sys.exit("\n".join([*heavy, *outside]) or "There is no site; run make docs.")
    largest = max(pages, key=lambda page: page.stat().st_size)
    print(f"{len(pages)} pages, the largest {largest.relative_to(SITE)} with {largest.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
