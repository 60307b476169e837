CREATE TABLE units AS
WITH documents AS (
    SELECT unit, bool_or(live) AS live, max(night) AS night, min(id) AS first_id, max(id) AS last_id
    FROM final WHERE (live OR winner) AND unit IN (SELECT unit FROM touched) GROUP BY unit
)
SELECT d.unit, h.file, coalesce(h.documents, 0) AS documents, d.live,
    CASE WHEN NOT d.live THEN d.night END AS night, d.first_id, d.last_id, p.ordinal
FROM documents d LEFT JOIN homes h USING (unit) LEFT JOIN planned p USING (unit)
UNION ALL
-- Units that stay as they are.
SELECT k.*, p.ordinal
FROM known_units k LEFT JOIN planned p USING (unit)
WHERE k.unit NOT IN (SELECT unit FROM touched) AND k.live = (p.unit IS NOT NULL)
UNION ALL
-- Units of the input without a document.
SELECT p.unit, NULL, 0, TRUE, NULL, NULL, NULL, p.ordinal
FROM planned p ANTI JOIN known_units k USING (unit) ANTI JOIN documents d USING (unit)
