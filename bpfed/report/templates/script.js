for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const names = column === 0 || head.classList.contains("words");
    const missing = cell => !names && cell.dataset.v === undefined;
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
const named = [...document.querySelectorAll("[data-name]")];
for (const label of document.querySelectorAll("label.filter")) {
  const field = label.querySelector("input");
  label.hidden = false;
  field.addEventListener("input", () => {
    const wanted = field.value.trim().toLocaleLowerCase();
    named.forEach(one => { one.hidden = wanted !== "" && !one.dataset.name.toLocaleLowerCase().includes(wanted); });
    if (wanted) document.querySelectorAll("details.more").forEach(d => { d.open = true; });
  });
}
const boxes = [...document.querySelectorAll(".scroll, .fits")].map(box => {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "Scroll sideways to see all columns";
  box.before(hint);
  return [box, hint];
});
const look = () => boxes.forEach(([box, hint]) => { hint.hidden = box.scrollWidth <= box.clientWidth + 1; });
addEventListener("resize", look);
look();
