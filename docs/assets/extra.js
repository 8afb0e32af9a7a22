// For screen readers and keyboards: the search has a name, and wide tables, code and diagrams can be scrolled.
// The theme makes code that does not overflow unreachable again, and draws diagrams late: hence the observer.
const scrolled = ".md-typeset__scrollwrap, .md-typeset p:has(> img:only-child), pre > code, div.mermaid"
const makeReachable = () => {
  for (const each of document.querySelectorAll(scrolled)) if (each.tabIndex < 0) each.tabIndex = 0
}
// Options do not break; in tables, names break at dots, underscores and capitals, so that columns stay narrow.
for (const each of document.querySelectorAll(".md-typeset :not(pre) > code, .md-typeset td > a")) {
  if (each.firstElementChild) continue
  if (each.closest("table"))
    each.innerHTML = each.innerHTML.replace(/([A-Za-z0-9](?:_|\.(?!py\b))|[a-z](?=[A-Z]))(?=\w)/g, "$1<wbr>")
  each.innerHTML = each.innerHTML.replace(/(^|\s)(--?\w[\w-]*)/g, '$1<span class="option">$2</span>')
}
// The button beside a terminal copies the commands, without the prompt and what they print.
for (const each of document.querySelectorAll(".language-console")) {
  const commands = each.innerText.match(/^\$ .*(?:\\\n.*)*/gm)
  if (commands) each.dataset.copy = commands.map(command => command.slice(2)).join("\n")
}
// Likewise of examples in the reference, with their ">>> " and "... ".
for (const each of document.querySelectorAll(".language-pycon")) {
  const lines = each.innerText.match(/^(>>>|\.\.\.) .*/gm)
  if (lines) each.dataset.copy = lines.map(line => line.slice(4)).join("\n")
}
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search")
  makeReachable()
  const changes = {subtree: true, childList: true, attributes: true, attributeFilter: ["tabindex"]}
  new MutationObserver(makeReachable).observe(document.body, changes)
})
