// For screen readers and keyboards: the search has a name, and wide tables, code and diagrams can be scrolled.
// The theme makes code that does not overflow unreachable again, and draws diagrams late: hence the observer.
const scrolled = ".md-typeset__scrollwrap, pre > code, div.mermaid"
const makeReachable = () => {
  for (const each of document.querySelectorAll(scrolled)) if (each.tabIndex < 0) each.tabIndex = 0
}
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  makeReachable()
  const changes = {subtree: true, childList: true, attributes: true, attributeFilter: ["tabindex"]}
  new MutationObserver(makeReachable).observe(document.body, changes)
})
