"use strict";
const filter = document.getElementById("filter");
const shown = document.getElementById("shown");
const cards = [...document.querySelectorAll("article[data-shape]")];

filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const card of cards) {
    card.hidden = !words.every((word) => card.dataset.shape.includes(word));
    count += card.hidden ? 0 : 1;
  }
  shown.textContent = words.length ? `${count} of ${cards.length}` : "";
});

// A link opens the section or the study that it leads to, also one that the filter has hidden.
function open() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target) return;
  target.hidden = false;
  target.querySelector("details").open = true;
  target.closest("section").querySelector("details").open = true;
  target.scrollIntoView({ block: "start" });
}
addEventListener("hashchange", open);
open();
