for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const names = column === 0, missing = cell => !names && cell.dataset.v === undefined;
    const rows = [...body.rows];
    rows.sort((one, two) => {
      const a = one.cells[column], b = two.cells[column];
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const order = names
        ? a.textContent.localeCompare(b.textContent, undefined, {numeric: true})
        : a.dataset.v - b.dataset.v;
      return down ? -order : order;
    });
    body.append(...rows);
  }));
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
