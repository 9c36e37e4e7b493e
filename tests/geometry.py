"Where things stand on a page: boxes of figures and of the text in them, as the browser has laid them out."
from urllib.parse import urlsplit

# What is measured in the page. Boxes are those of getBoundingClientRect, in px.
MEASURE = r'''
globalThis.geometry ??= (() => {
  const KINDS = [['title', '.gtitle'], ['legend', '.legend .legendtext'], ['legend title', '.legendtitletext'],
    ['axis title', '.infolayer > [class^="g-x"] text, .infolayer > [class^="g-y"] text'],
    ['annotation', '.annotation-text'], ['colour bar title', '.cbtitle text'], ['colour bar tick', '.cbaxis text'],
    ['tick', '.cartesianlayer g[class$="tick"] text'], ['buttons', '.modebar']];
  const OURS = ['.nas-status', '.nas-feed', '.nas-note', '.nas-what-if', '.nas-merges', '.nas-state', '.nas-runs'];
  const CONTROLS = ['.widget-button', '.widget-slider', '.widget-dropdown'];
  const box = e => { const r = e.getBoundingClientRect(); return { x: r.x, y: r.y, w: r.width, h: r.height }; };
  const axis = e => e.closest('g[class$="tick"]')?.getAttribute('class') ?? '';
  const turned = e => /rotate\((?!0[,)])/.test(e.getAttribute('transform') ?? '');
  const texts = plot => {
    const found = [], seen = new Set();
    for (const [kind, selector] of KINDS) for (const e of plot.querySelectorAll(selector)) {
      if (seen.has(e)) continue;
      seen.add(e);
      const b = box(e), style = getComputedStyle(e);
      if (!b.w || !b.h || style.visibility === 'hidden' || style.display === 'none') continue;
      if (kind !== 'buttons' && style.opacity === '0') continue;
      const text = kind === 'buttons' ? '' : e.textContent.trim();
      found.push({ kind, text, axis: kind === 'tick' ? axis(e) : '', turned: turned(e), ...b });
    }
    return found;
  };
  const figure = p => {
    const svg = p.querySelector('.main-svg'), drawn = svg ? box(svg) : null;
    return { title: p.layout.title?.text ?? '', ...box(p), drawn, data: p.data?.length ?? 0, texts: texts(p) };
  };
  const figures = () => [...document.querySelectorAll('.js-plotly-plot')]
    .filter(p => p.offsetParent !== null && p.layout).map(figure);
  const called = e => e.className.split(' ').filter(c => c.startsWith('nas'))[0] ?? e.textContent.trim();
  const others = () => [...document.querySelectorAll([...OURS, ...CONTROLS].join(', '))]
    .filter(e => e.offsetParent !== null && e.getBoundingClientRect().height)
    .map(e => ({ title: called(e), ...box(e) }));
  // Contrast of text as WCAG counts it. Backgrounds and the text itself may be partly transparent.
  const rgba = s => {
    const v = (s.match(/[\d.]+/g) ?? []).map(Number);
    return v.length < 3 ? [0, 0, 0, 0] : [v[0], v[1], v[2], v[3] ?? 1];
  };
  const onto = (top, under) => top.slice(0, 3).map((v, i) => v*top[3] + under[i]*(1 - top[3]));
  const linear = v => v <= .03928 ? v/12.92 : ((v + .055)/1.055)**2.4;
  const light = c => c.slice(0, 3).map(v => linear(v/255)).reduce((sum, v, i) => sum + v*[.2126, .7152, .0722][i], 0);
  const backdrop = e => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c[3] > 0) layers.push(c);
      if (c[3] >= 1) break;
    }
    return layers.reverse().reduce((under, top) => onto(top, under), [255, 255, 255]);
  };
  const contrast = (e, colour) => {
    const back = backdrop(e), c = rgba(colour);
    for (let at = e; at; at = at.parentElement) c[3] *= Number(getComputedStyle(at).opacity);
    const [a, b] = [light(onto(c, back)), light(back)].sort((x, y) => y - x);
    return (a + .05)/(b + .05);
  };
  const pages = () => [...document.querySelectorAll(OURS.join(', '))]
    .filter(e => e.offsetParent !== null).flatMap(root => [root, ...root.querySelectorAll('*')])
    .filter(e => !e.disabled && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
  const faint = least => {
    const found = new Set();
    for (const e of pages()) {
      const c = contrast(e, getComputedStyle(e).color);
      if (c < least) found.add(`"${e.textContent.trim().slice(0, 30)}" has a contrast of ${c.toFixed(2)}`);
    }
    for (const p of document.querySelectorAll('.js-plotly-plot')) for (const e of p.querySelectorAll('text')) {
      if (p.offsetParent === null || e.closest('.hoverlayer, .heatmap-label') || !e.textContent.trim()) continue;
      const style = getComputedStyle(e), fill = rgba(style.fill);
      fill[3] *= Number(style.fillOpacity);
      const c = contrast(e, `rgba(${fill.join(',')})`);
      const title = p.layout?.title?.text?.slice(0, 30), text = e.textContent.trim().slice(0, 30);
      if (c < least) found.add(`${title}: "${text}" has a contrast of ${c.toFixed(2)}`);
    }
    return [...found];
  };
  const over = (a, b, by) => Math.min(a.x + a.w, b.x + b.w) - Math.max(a.x, b.x) > by
    && Math.min(a.y + a.h, b.y + b.h) - Math.max(a.y, b.y) > by;
  const outside = (t, f) => t.x < f.x - 1 || t.x + t.w > f.x + f.w + 1 || t.y < f.y - 1 || t.y + t.h > f.y + f.h + 1;
  const size = b => `${Math.round(b.w)} x ${Math.round(b.h)} px`;
  const name = t => t.kind + (t.text ? ` "${t.text.slice(0, 30)}"` : '');
  // A sentence for each thing that is wrong. `settled`: nothing is being resized at this moment
  const wrong = settled => {
    const found = [], all = figures(), boxes = [...all, ...others()];
    for (const f of all) {
      const say = s => found.push(`${f.title.slice(0, 40) || '(no title)'}: ${s}`);
      if (f.h < 200) say(`only ${Math.round(f.h)} px high`);
      if (f.w < 200) say(`only ${Math.round(f.w)} px wide`);
      if (f.drawn && f.drawn.h < 200) say(`drawn only ${Math.round(f.drawn.h)} px high`);
      if (settled && f.drawn && (Math.abs(f.drawn.w - f.w) > 2 || Math.abs(f.drawn.h - f.h) > 2))
        say(`drawn ${size(f.drawn)} in a box of ${size(f)}`);
      f.texts.forEach((t, i) => {
        if (settled && t.kind !== 'buttons' && outside(t, f))
          say(`${name(t)} is cut off`);
        for (const u of f.texts.slice(i + 1)) {
          if (t.kind === 'tick' && u.kind === 'tick' && t.axis === u.axis && (t.turned || u.turned)) continue;
          if (u.kind === 'buttons' && t.kind !== 'title') continue;
          if (over(t, u, 1)) say(`${name(t)} over ${name(u)}`);
        }
      });
    }
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
      if (i >= all.length || !over(a, b, 1)) return;
      found.push(`box of ${a.title.slice(0, 40)} over box of ${b.title.slice(0, 40)}`);
    }));
    if (settled) for (const b of document.querySelectorAll('.nas-watch .widget-button'))
      if (b.offsetParent !== null && b.scrollWidth > b.clientWidth + 1)
        found.push(`button "${b.textContent.trim()}" is cut off`);
    return found;
  };
  return { figures, others, wrong, faint };
})();
'''

RECORD = r'''
every => {
  const record = globalThis.record ??= { label: '', found: {}, samples: 0, drawn: 0, least: Infinity, moved: 0 };
  if (record.timer) return;
  const look = () => {
    const all = geometry.figures();
    record.samples += 1;
    record.drawn += all.length > 0;
    for (const f of all) record.least = Math.min(record.least, f.h);
    const settled = performance.now() - record.moved > 1200;
    const faint = settled ? geometry.faint(4.5) : [];
    for (const s of [...geometry.wrong(settled), ...faint]) (record.found[s] ??= new Set()).add(record.label);
  };
  addEventListener('resize', () => { record.moved = performance.now(); });
  record.timer = setInterval(look, every);
}
'''


def wrong(page):
    "What is wrong with the figures on the page at this moment: sentences."
    page.evaluate(MEASURE)
    return page.evaluate('() => geometry.wrong(true)')


def faint(page, least=4.5):
    "Text on the page, of figures and of our own HTML, whose contrast is below `least`: sentences."
    page.evaluate(MEASURE)
    return page.evaluate('least => geometry.faint(least)', least)


def figures(page):
    "Figures that can be seen on the page: title, box and the texts in them."
    page.evaluate(MEASURE)
    return page.evaluate('() => geometry.figures()')


class Recorder:
    "Looks at the page several times a second, in the page itself: nothing between two looks of a test is missed."
    def __init__(self, page, every=150):      # milliseconds
        self.page = page
        page.evaluate(MEASURE)
        page.evaluate(RECORD, every)

    def label(self, text):
        "What is being done to the page from now on; what is found carries it."
        self.page.evaluate('text => { record.label = text; record.moved = performance.now(); }', text)

    def look(self, text, seconds):
        "Do nothing for some seconds but look."
        self.label(text)
        self.page.wait_for_timeout(1000*seconds)

    @property
    def found(self):
        "Sentences, each with what was being done when it was seen."
        found = self.page.evaluate("() => Object.entries(record.found).map(([s, labels]) => [s, [...labels]])")
        lines = []
        for sentence, labels in found:
            more = ', ...' if len(labels) > 4 else ''
            lines.append(f'{sentence} ({"; ".join(labels[:4])}{more})')
        return lines

    @property
    def samples(self):
        "How often figures were seen."
        return self.page.evaluate('() => record.drawn')

    @property
    def least(self):
        "The height of the lowest figure that was ever seen, in px."
        return self.page.evaluate('() => record.least')


class Traffic:
    "What a page asks for and complains about."
    def __init__(self, page, before=None):      # `before`: what was known of other visits
        self.requests = set(before.requests) if before else set()
        self.errors = list(before.errors) if before else []
        page.on('request', lambda r: self.requests.add(self.kind(r.method, r.url)))
        page.on('pageerror', lambda e: self.errors.append(str(e)))
        page.on('console', lambda m: self.errors.append(m.text) if m.type == 'error' else None)

    @staticmethod
    def kind(method, url):
        "A request without what differs from page to page: numbers, names of files."
        parts = urlsplit(url)
        if parts.scheme in ('data', 'blob'):
            return 'from the page itself'
        host = '' if parts.hostname == '127.0.0.1' else parts.netloc
        return f'{method} {host}/{"/".join(parts.path.split("/")[1:3])}'
