// What scrolls sideways can be reached and scrolled with the keyboard.
(() => {
  const look = () => document.querySelectorAll("pre, .table-wrapper").forEach(one => {
    if (one.scrollWidth > one.clientWidth + 1) one.tabIndex = 0;
    else one.removeAttribute("tabindex");
  });
  addEventListener("load", look);
  addEventListener("resize", look);
})();
