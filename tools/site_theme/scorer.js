// Search shows the lessons first, then the guides, then functions; within each, as Sphinx does.
var Scorer = {
  score: ([page, _title, _anchor, _description, score]) =>
    score + (page.startsWith("notebooks/") ? 200 : page.startsWith("docs/") ? 100 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
