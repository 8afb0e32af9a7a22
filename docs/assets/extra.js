// For screen readers and keyboards: the search has a name, and wide tables and code can be scrolled.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  for (const scrolled of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) scrolled.tabIndex = 0
})
