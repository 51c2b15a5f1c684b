/* Says of code and tables that are wider than the page where there is more of them. */
document.addEventListener("DOMContentLoaded", () => {
  const boxes = document.querySelectorAll(".highlight pre, .table-wrapper, .cell_output pre");
  const mark = (box) => {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", hidden - box.scrollLeft > 1);
    if (hidden > 1) box.tabIndex = 0; // so that the arrow keys reach it
    else box.removeAttribute("tabindex");
  };
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
  for (const box of boxes) {
    box.addEventListener("scroll", () => mark(box), { passive: true });
    observer.observe(box);
  }
});
