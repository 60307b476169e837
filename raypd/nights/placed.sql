CREATE OR REPLACE TABLE placed AS
WITH entries AS (
    SELECT *, TRUE AS live, '{night}' AS night FROM read JOIN planned USING (unit)
    UNION ALL BY NAME
    SELECT o.* REPLACE (p.ordinal AS ordinal, CASE WHEN {usable} THEN o.file END AS file, '{night}' AS night)
    FROM old o JOIN planned p USING (unit) WHERE o.live
    UNION ALL BY NAME
    SELECT o.* REPLACE (FALSE AS live) FROM old o WHERE o.winner AND o.file IS NOT NULL
        AND o.unit NOT IN (SELECT unit FROM planned)
        AND ({keep} OR o.source IN (SELECT source FROM damaged))
), known AS (
    SELECT id, hash, any_value(struct_pack(file := file, source := source, "row" := "row",
        category := category, ok := ok)) AS there
    FROM old o WHERE file IS NOT NULL AND {usable} GROUP BY id, hash
)
SELECT
    e.* REPLACE (
        row_number() OVER (PARTITION BY e.id
            ORDER BY e.live DESC, e.night DESC, e.source DESC, e.row DESC) = 1 AS winner,
        coalesce(e.file, k.there.file) AS file,
        CASE WHEN e.file IS NULL THEN k.there.category ELSE e.category END AS category,
        CASE WHEN e.file IS NULL THEN k.there.ok ELSE e.ok END AS ok),
    CASE WHEN e.file IS NULL THEN k.there.source ELSE e.source END AS from_source,
    CASE WHEN e.file IS NULL THEN k.there.row ELSE e.row END AS from_row
FROM entries e LEFT JOIN known k ON e.file IS NULL AND k.id = e.id AND k.hash = e.hash
