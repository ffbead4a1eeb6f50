// A link to each other version that was built beside this one; ../versions.js lists them.
(() => {
  const here = document.currentScript, place = document.querySelector(".versions");
  for (const one of window.bpfedVersions || []) {
    if (one === here.dataset.version) continue;
    const link = document.createElement("a");
    link.href = `${here.dataset.root}${one}/index.html`;
    link.textContent = one;
    place.append(" · ", link);
  }
})();
